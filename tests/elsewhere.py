"""A process in which nothing is there that another system, or an installation without extras, may lack.

`hide()` before anything is imported; or for a whole run of tests, which then says what a Windows machine would:

    PYTHONPATH=tests pytest -p elsewhere tests/experiment
"""

import os
import signal
import socket
import sys

POSIX = ("fcntl", "grp", "pwd", "resource", "termios")
EXTRA = ("httptools", "httpx", "nacl", "starlette", "uvicorn", "uvloop")
_OF_OS = ("fork", "forkpty", "getpgid", "killpg", "memfd_create", "mkfifo", "sched_getaffinity", "setsid", "statvfs")
_OF_SIGNAL = ("SIGALRM", "SIGHUP", "SIGUSR1", "pthread_sigmask", "setitimer")


class _Short:
    """A finder of modules that does not find some names."""

    def __init__(self, finder, names):
        self._finder, self._names = finder, names

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self._names else self._finder.find_spec(name, path, target)


def hide(*, posix=True, extra=True):
    names = POSIX * posix + EXTRA * extra
    for loaded in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[loaded]
    sys.meta_path[:] = [_Short(finder, names) for finder in sys.meta_path]
    if posix:
        for holder, attributes in ((os, _OF_OS), (signal, _OF_SIGNAL), (socket, ("AF_UNIX",))):
            for attribute in attributes:
                if hasattr(holder, attribute):
                    delattr(holder, attribute)


def pytest_load_initial_conftests():
    """As a plugin: before any test, or the library, is imported."""
    hide()
