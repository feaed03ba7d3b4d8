"""The error output of prolog and epilog: one line to slurmd (stderr) and to the system log, nothing else."""

from __future__ import annotations

import syslog

from gemini_hpc import lines


def log_fault(where: str, job: int, text: str) -> None:
    """Log `text`, which may contain any character, as one line."""
    line = f"{where}: job={job} {lines.replace_unprintable(text[:500])}"
    lines.write_line(line)  # slurmd may have closed its end; the system log still gets the line
    syslog.openlog("gemini-hpc", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_ERR, line)
