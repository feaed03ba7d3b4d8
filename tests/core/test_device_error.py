from __future__ import annotations

import pytest

from gemini_hpc.core.device_error import is_device_error


class AcceleratorError(RuntimeError):
    """As torch has it from 2.8 on."""


class OutOfMemoryError(RuntimeError):
    """As torch has it."""


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ..."), True),
        (AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("HIP error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), True),
        (AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error: invalid device ordinal"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ZeroDivisionError("division by zero"), False),
        (ValueError("CUDA error: of a user"), False),
        (None, False),
    ],
)
def test_what_speaks_against_a_device(error: BaseException | None, found: bool) -> None:
    assert is_device_error(error) is found
