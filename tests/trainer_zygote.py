"""A process that has the trainer's heavy imports behind it and forks trainers: `Zygote` in the test, `main` in the process.

Each trainer is a process of its own, with a session, an environment and a log of its own; only the seconds that it would spend
on imports are spent once for all tests of a module.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0


class Forked:
    """A forked trainer; has what the tests use of `subprocess.Popen`."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote

    @property
    def returncode(self) -> int | None:
        return self._zygote.codes.get(self.pid)

    def poll(self) -> int | None:
        self._zygote.listen(0)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Its exit code. Raises `TimeoutExpired`."""
        until = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"trainer {self.pid}", timeout_s)
            self._zygote.listen(0.1)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # until its end is reported, nobody else can have its number
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """Started at the first use; ends with its standard input, so also when the test process is killed."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), "DS_ACCELERATOR": "cpu"}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self.codes: dict[int, int] = {}
        self._read = b""
        self._started: list[int] = []

    def fork(self, arguments: list[str], environment: dict[str, str], log: Path, killed_at: str) -> Forked:
        """A trainer whose command line this is."""
        order = {"arguments": arguments, "environment": environment, "log": str(log), "killed_at": killed_at}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        until = time.monotonic() + START_S
        while not self._started:
            assert time.monotonic() < until and self._process.poll() is None, "no trainer can be forked"
            self.listen(0.5)
        return Forked(self, self._started.pop())

    def listen(self, timeout_s: float) -> None:
        """Take in what the process says of its children."""
        assert self._process.stdout is not None
        number = self._process.stdout.fileno()
        while select.select([number], [], [], timeout_s)[0]:
            data = os.read(number, 65536)
            if not data:
                return
            *lines, self._read = (self._read + data).split(b"\n")
            for line in lines:
                told = json.loads(line)
                if "code" in told:
                    self.codes[told["pid"]] = told["code"]
                else:
                    self._started.append(told["pid"])
            timeout_s = 0

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()


def _tell(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _become(order: dict[str, Any], begin: int) -> NoReturn:
    """In the forked child: a trainer, as its command line would have made it."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(begin)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["headrace", *order["arguments"]]
    code = 1
    try:
        from services.cli import main as headrace

        if order["killed_at"]:
            import trainer_killed

            trainer_killed.arm_at(order["killed_at"])
        code = headrace(order["arguments"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Fork one trainer for each order on standard input; tell the pid, and later the exit code."""
    import deepspeed  # noqa: F401

    import trainer.service  # noqa: F401

    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = b""
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == 0:
                    break
                _tell(pid=pid, code=os.waitstatus_to_exitcode(status))
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *orders, waiting = (waiting + data).split(b"\n")
            for order in orders:
                begun, begin = os.pipe()
                pid = os.fork()
                if pid == 0:
                    _become(json.loads(order), begin)
                os.close(begin)
                os.read(begun, 1)  # it has a session and a log of its own, or has ended
                os.close(begun)
                _tell(pid=pid)


if __name__ == "__main__":
    main()
