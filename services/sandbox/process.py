"""Runs one bubblewrap to its end in the calling thread: spawn, confine, drain, and confirm that the whole tree is gone.

A thread and not the event loop, because a flooding command would otherwise take the loop's time, and because
`--die-with-parent` is tied to the thread that started the process: the one that waits for it here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from services.sandbox.capture import Capture
from services.sandbox.cgroups import Cgroup
from services.sandbox.command import CommandResult, CommandSpec, Outcome, SetupFailed, TeardownUnconfirmed, check_argv
from services.sandbox.launcher import Launcher, command_line, environment, options

_START_DEADLINE_S = 20.0
_KILL_DEADLINE_S = 20.0
_READ_BYTES = 1 << 16
_FLOOD_BYTES = 4 << 20  # beyond this many dropped bytes, reading is paced, so that a flood costs this host little
_FLOOD_PAUSE_S = 0.002


def run_blocking(
    launcher: Launcher,
    spec: CommandSpec,
    *,
    cgroup: Cgroup | None = None,
    cancel_fd: int = -1,
    on_started: Callable[[], None] | None = None,
) -> CommandResult:
    """Run a command; returns when no process of it is left.

    `cancel_fd` becoming readable kills the tree. `on_started` is called once bubblewrap has made its namespaces. Raises
    `CommandRefused`, `SetupFailed` (the command did not start) or `TeardownUnconfirmed`.
    """
    check_argv(spec.argv)
    run = _Run(launcher, spec, cgroup, cancel_fd, on_started)
    try:
        return run.result()
    finally:
        run.close()


class _Run:
    def __init__(
        self,
        launcher: Launcher,
        spec: CommandSpec,
        cgroup: Cgroup | None,
        cancel_fd: int,
        on_started: Callable[[], None] | None,
    ) -> None:
        self.launcher, self.spec, self.cgroup = launcher, spec, cgroup
        self.cancel_fd, self.on_started = cancel_fd, on_started
        self.handles: set[int] = set()  # open descriptors, each closed exactly once
        self.poll = select.poll()
        self.buffer = bytearray(_READ_BYTES)
        self.streams: dict[int, Capture] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.outer = -1  # pidfd of the launcher
        self.status = b""
        self.started = False  # the namespaces exist
        self.init = -1  # pidfd of the namespace's first process
        self.ended: Outcome | None = None  # why we killed it, if we did
        self.exit_code: int | None = None
        self.cpu_s = 0.0

    def close(self) -> None:
        """Also on the way out of an error: whatever still runs is killed, though nobody waits for it here any more."""
        if self.process is not None and self.process.returncode is None:
            self._kill()
            waiter = select.poll()
            waiter.register(self.outer, select.POLLIN)
            if waiter.poll(1000):
                self._reap()
        for handle in list(self.handles):
            self._close(handle)

    def result(self) -> CommandResult:
        cpu_before = self.cgroup.cpu_s() if self.cgroup else None
        oom_before, forks_before = self._counters()
        self._spawn()
        self._drain()
        self._confirm_gone()
        finished = time.monotonic()
        oom, forks = self._counters()
        if self.ended is Outcome.TIMED_OUT and not self.started:
            raise SetupFailed(f"bubblewrap made no namespace within {_START_DEADLINE_S:g} s")
        outcome = self.ended or (Outcome.OOM_KILLED if oom > oom_before else Outcome.EXITED)
        if outcome is Outcome.EXITED:
            self._check_started()
            if self.exit_code is None:
                outcome = Outcome.CANCELLED  # somebody outside killed the launcher
        cpu_after = self.cgroup.cpu_s() if self.cgroup else None
        return CommandResult(
            command_id=self.spec.command_id,
            outcome=outcome,
            exit_code=None if self.ended else self.exit_code,
            stdout=self.out.data(),
            stderr=self.err.data(),
            dropped_bytes=self.out.dropped_bytes + self.err.dropped_bytes,
            timed_out=outcome is Outcome.TIMED_OUT,
            oom_killed=oom > oom_before,
            process_limit_hit=forks > forks_before,
            cpu_s=self.cpu_s if cpu_before is None or cpu_after is None else cpu_after - cpu_before,
            wall_s=finished - self.started_s,
        )

    def _spawn(self) -> None:
        """Start the launcher; it waits for its options, so the limits are in force before it does anything."""
        args_r, args_w = self._pipe()
        self.status_fd, status_w = self._pipe()
        out_r, out_w = self._pipe()
        err_r, err_w = self._pipe()
        inherited = [args_r, status_w]
        seccomp_fd: int | None = None
        if self.launcher.seccomp_path:
            seccomp_fd = self._keep(os.open(self.launcher.seccomp_path, os.O_RDONLY | os.O_CLOEXEC))
            inherited.append(seccomp_fd)
        try:
            with self._on_cpus():
                self.process = subprocess.Popen(
                    command_line(self.launcher, self.spec, args_r),
                    stdin=subprocess.DEVNULL,
                    stdout=out_w,
                    stderr=err_w,
                    pass_fds=inherited,
                    env=environment(self.spec),
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            raise SetupFailed(f"{self.launcher.bwrap}: cannot be started ({error.strerror})") from error
        finally:
            for handle in (*inherited, out_w, err_w):
                self._close(handle)
        self.outer = self._keep(os.pidfd_open(self.process.pid))
        self.started_s = time.monotonic()
        self.deadline_s = self.started_s + _START_DEADLINE_S
        try:
            self._confine(self.process.pid)
        except OSError as error:
            self._kill()
            self._reap()
            raise SetupFailed(f"sandbox limits: {error}") from error
        with contextlib.suppress(BrokenPipeError):  # then bubblewrap has already failed and says why on its error stream
            os.write(args_w, options(self.launcher, self.spec, status_fd=status_w, seccomp_fd=seccomp_fd))
        self._close(args_w)
        self.out, self.err = Capture(self.spec.limits.output_bytes), Capture(self.spec.limits.output_bytes)
        self.streams = {out_r: self.out, err_r: self.err}
        for handle in (out_r, err_r, self.status_fd, self.outer):
            self.poll.register(handle, select.POLLIN)
        if self.cancel_fd >= 0:
            self.poll.register(self.cancel_fd, select.POLLIN)

    def _confine(self, pid: int) -> None:
        if self.cgroup is not None:
            self.cgroup.enter(pid)

    @contextlib.contextmanager
    def _on_cpus(self) -> Iterator[None]:
        """Without a cpuset group, what this thread starts inherits its CPUs: those of another user's process are not ours to
        set without CAP_SYS_NICE, and the launcher changes its user at once."""
        if not self.spec.cpus or (self.cgroup is not None and "cpuset" in self.cgroup.controllers):
            yield
            return
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.spec.cpus)
        try:
            yield
        finally:
            os.sched_setaffinity(0, own)

    def _drain(self) -> None:
        """Read until both streams have ended and the launcher is reaped; kill at the deadline or when asked to."""
        alive = True
        while alive or self.streams:
            wait_s = self.deadline_s - time.monotonic()
            if wait_s <= 0:
                self._overdue()
                continue
            for handle, _ in self.poll.poll(wait_s * 1000 + 1):
                if handle in self.streams:
                    self._read_stream(handle)
                elif handle == self.status_fd:
                    self._read_status()
                elif handle == self.outer:
                    self._reap()
                    self._kill()  # a launcher that was itself killed leaves the namespace's first process to us
                    self.poll.unregister(handle)
                    alive = False
                else:
                    self.poll.unregister(handle)
                    self._end(Outcome.CANCELLED)
            if max(capture.dropped_bytes for capture in (self.out, self.err)) > _FLOOD_BYTES:
                self._pace()

    def _overdue(self) -> None:
        if self.ended is not None:
            raise TeardownUnconfirmed(f"command {self.spec.command_id}: processes outlive SIGKILL by {_KILL_DEADLINE_S:g} s")
        self._end(Outcome.TIMED_OUT)

    def _end(self, why: Outcome) -> None:
        if self.ended is None:
            self.ended = why
            self.deadline_s = time.monotonic() + _KILL_DEADLINE_S
            self._kill()

    def _read_stream(self, handle: int) -> None:
        count = os.readv(handle, [self.buffer])
        if count:
            self.streams[handle].feed(memoryview(self.buffer)[:count])
        else:
            self.poll.unregister(handle)
            del self.streams[handle]

    def _pace(self) -> None:
        if len(self.buffer) == _READ_BYTES:
            self.buffer = bytearray(16 * _READ_BYTES)
            for handle in self.streams:
                with contextlib.suppress(OSError):  # an unprivileged user may be out of pipe memory; then it stays small
                    fcntl.fcntl(handle, fcntl.F_SETPIPE_SZ, len(self.buffer))
        time.sleep(_FLOOD_PAUSE_S)

    def _read_status(self) -> None:
        """bubblewrap writes JSON documents, in several pieces: first the namespace's first process, at last its code."""
        chunk = os.read(self.status_fd, 4096)
        self.status += chunk
        if not chunk:
            self.poll.unregister(self.status_fd)
        if self.started or b"\n" not in self.status:
            return
        self.started = True
        pid = json.loads(self.status.split(b"\n", 1)[0])["child-pid"]
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            handle = self._keep(os.pidfd_open(pid))
            # Another parent: the first process has ended already, and its number is somebody else's.
            if self.process is not None and _parent_of(pid) == self.process.pid:
                self.init = handle
        if self.ended is None:
            self.started_s = time.monotonic()
            self.deadline_s = self.started_s + self.spec.timeout_s
            if self.on_started is not None:
                self.on_started()
        else:
            self._kill()

    def _kill(self) -> None:
        """The end of the first process is the end of its namespace; before there is one, the launcher dies."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.init if self.init >= 0 else self.outer, signal.SIGKILL)

    def _reap(self) -> None:
        """Without a control group, processes that were killed with their namespace are missing in the CPU time."""
        assert self.process is not None
        _, status, usage = os.wait4(self.process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self.cpu_s = usage.ru_utime + usage.ru_stime
        self.process.returncode = code
        self.exit_code = code if code >= 0 else None

    def _confirm_gone(self) -> None:
        if self.init >= 0:
            waiter = select.poll()
            waiter.register(self.init, select.POLLIN)
            if not waiter.poll(_KILL_DEADLINE_S * 1000):
                raise TeardownUnconfirmed(f"command {self.spec.command_id}: its namespace outlives SIGKILL")
        if self.cgroup is not None:
            self.cgroup.kill()

    def _check_started(self) -> None:
        """bubblewrap reports an exit code only for a command that it started; else its own error stream says what failed."""
        while chunk := os.read(self.status_fd, 4096):
            self.status += chunk
        if b'"exit-code"' not in self.status and self.exit_code is not None:
            text = self.err.data().decode(errors="replace").strip()
            raise SetupFailed(f"bubblewrap could not set up the sandbox: {text or f'exit code {self.exit_code}'}")

    def _counters(self) -> tuple[int, int]:
        return (self.cgroup.oom_kills(), self.cgroup.process_limit_hits()) if self.cgroup else (0, 0)

    def _pipe(self) -> tuple[int, int]:
        read, write = os.pipe()
        return self._keep(read), self._keep(write)

    def _keep(self, handle: int) -> int:
        self.handles.add(handle)
        return handle

    def _close(self, handle: int) -> None:
        self.handles.remove(handle)
        os.close(handle)


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
