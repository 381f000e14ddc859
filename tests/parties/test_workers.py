"""A service of several processes: one that would fail again ends it, any other is replaced, and counts add up."""

from __future__ import annotations

import mmap
import subprocess
import sys

from dovetail.parties.http import workers
from dovetail.parties.http.workers import SharedCounts

SERVICE = """
import os, pathlib, signal, sys
from dovetail.parties.http import workers
workers._STARTED = 0.05
number = workers.Supervisor(1).start()
(pathlib.Path(sys.argv[1]) / f"{number}-{os.getpid()}").touch()
if number == 1:
    begun = len(list(pathlib.Path(sys.argv[1]).glob("1-*")))
    os._exit(2 if begun == 2 else 1)
signal.pause()
"""


def test_a_process_that_would_fail_again_ends_the_service_and_any_other_is_replaced(tmp_path):
    """The first process fails, the second one finds that what it was given is wrong."""
    ended = subprocess.run([sys.executable, "-c", SERVICE, str(tmp_path)], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert len(list(tmp_path.glob("1-*"))) == 2
    assert ended.stderr.count("is replaced") == 1


def test_counts_of_all_processes_add_up_and_what_does_not_fit_is_not_shown():
    pages = mmap.mmap(-1, 2 * workers._PAGE)
    ours, others = SharedCounts(pages, 0), SharedCounts(pages, 1)
    ours["uploads"], others["uploads"], others["refused"] = 2, 3, 1
    assert ours.counts_of_all_processes() == {"uploads": 2}  # nothing is published yet
    others.publish()
    assert ours.counts_of_all_processes() == {"uploads": 5, "refused": 1}
    assert others.counts_of_all_processes() == {"uploads": 3, "refused": 1}
    longest = workers._PAGE - 4 - len(b'{"": 1}')  # with the four bytes that say how long it is, the whole page
    for length, shown in ((longest + 1, {"uploads": 5, "refused": 1}), (longest, {"uploads": 2, "x" * longest: 1})):
        others.clear()
        others["x" * length] = 1
        others.publish()
        assert ours.counts_of_all_processes() == shown
