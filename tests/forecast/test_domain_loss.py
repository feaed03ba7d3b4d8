from __future__ import annotations

from dataclasses import astuple

import pytest

from gemini_hpc.forecast.protection import DomainLoss, compute_domain_loss


def test_losses_of_whole_domains() -> None:
    for of, m, found in (
        (["a", "a", "b", "b"], 2, DomainLoss(2, 1.0, 0.0)),
        (["a", "b", "c", "d"], 2, DomainLoss(4, 1.0, 1.0)),
        (["a"] * 4, 2, DomainLoss(1, 0.0, 0.0)),
        (["a", "a", "b", "b"], 1, DomainLoss(2, 0.0, 0.0)),
        (["a", "a", "a", "b"], 2, DomainLoss(2, 0.5, 0.5)),
        ([f"r{k // 8}" for k in range(64)], 2, DomainLoss(8, 1.0, 0.0)),
        ([f"r{k // 8}" for k in range(65)], 3, DomainLoss(9, 1.0, 1 / 9)),
    ):
        assert astuple(compute_domain_loss(of, m)) == pytest.approx(astuple(found)), of


def test_without_domains_there_is_no_answer() -> None:
    with pytest.raises(ValueError, match="no node has a known failure domain"):
        compute_domain_loss(["", ""], 2)
