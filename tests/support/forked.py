"""Starts modules of hetmpi as forks of one process that has imported torch and other packages, which take two of the
three seconds that a rank needs before its first step.

    python -IS forked.py SOCKET -m MODULE ARGS...    in place of python -m MODULE ARGS..., and so for SCRIPT ARGS...
    python forked.py serve SOCKET                    the process that forks, until its standard input ends

A fork is a process with the environment, folder, files and cores of the first command, which stays as its stand-in:
signals are passed on, the exit code comes back, and neither outlives the other. Unlike programs that are started,
forks have the same hash seed, and torch is loaded before MPI: in .ci/weekly there are none (HETMPI_TEST_FORKS=0)."""

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import sys

MAX_FDS, MAX_BYTES = 250, 1 << 17
PR_SET_PDEATHSIG = 1
PASSED_ON = {*range(1, 32)} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
PACKAGES = (
    "torch", "torch.utils.data", "hydra", "omegaconf.grammar_parser", "numpy.ma", "pyarrow.csv", "pyarrow.parquet",
    "rich.progress", "tensorboard.plugins.hparams.summary_v2", "tensorboard.summary.writer.event_file_writer",
    "concurrent.futures.thread", "multiprocessing.connection",
)  # fmt: skip


def stand_in(path, arguments):
    """Asks for a fork and ends as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until they can be passed on
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(path)
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    numbers = [number for number in numbers if number != channel.fileno() and is_open(number)]
    cores = sorted(os.sched_getaffinity(0))
    asked = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ), "fds": numbers, "cores": cores}
    socket.send_fds(channel, [json.dumps(asked).encode()], numbers)
    pid = int(channel.recv(32))

    def pass_on(number, frame):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = int(channel.recv(32) or -signal.SIGKILL)
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def serve(path):
    """Forks for all that ask. Returns in each fork, with what it is to do, and its files at their numbers."""
    import select

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    poll.register(listener, select.POLLIN)
    channels, forks = {}, {}  # by number: of stand-ins, and pidfd -> (pid, channel)
    while True:
        for number, _ in poll.poll():
            if number == 0:
                sys.exit()
            if number == listener.fileno():
                channel, _ = listener.accept()
                channels[channel.fileno()] = channel
                poll.register(channel, select.POLLIN)
            elif number in forks:
                pid, channel = forks.pop(number)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                poll.unregister(number)
                os.close(number)
                if channel.fileno() >= 0:
                    tell(channel, code)
            elif any(channel is channels[number] for _, channel in forks.values()):  # the stand-in was killed
                [pid] = [pid for pid, channel in forks.values() if channel is channels[number]]
                os.kill(pid, signal.SIGKILL)
                poll.unregister(number)
                channels.pop(number).close()
            else:
                channel = channels[number]
                text, fds = b"", []
                with contextlib.suppress(ConnectionResetError):  # the stand-in was killed
                    text, fds, flags, _ = socket.recv_fds(channel, MAX_BYTES, MAX_FDS)
                    assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "an environment or files too large"
                if not text:
                    poll.unregister(number)
                    channels.pop(number).close()
                    continue
                asked = json.loads(text)
                pid = os.fork()
                if pid == 0:
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    for owned in (listener, *channels.values()):
                        owned.close()
                    for pidfd in forks:
                        os.close(pidfd)
                    place(fds, asked["fds"])
                    return asked
                tell(channel, pid)
                for fd in fds:
                    os.close(fd)
                pidfd = os.pidfd_open(pid)
                forks[pidfd] = pid, channel
                poll.register(pidfd, select.POLLIN)


def tell(channel, number):
    with contextlib.suppress(OSError):  # the stand-in was killed
        channel.send(str(number).encode())


def place(fds, numbers):
    """Gives the files `fds` these numbers, and closes all others."""
    import fcntl

    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1 + MAX_FDS) for fd in fds]
    os.closerange(0, max(numbers) + 1 + MAX_FDS)
    for fd, number in zip(above, numbers):
        os.dup2(fd, number)
        os.close(fd)


def become(asked):
    """Runs what was asked as Python does, in the module __main__."""
    import numpy
    import torch

    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    os.sched_setaffinity(0, asked["cores"])
    with open("/proc/self/comm", "w") as name:
        name.write(asked["env"].get("HETMPI_TEST_RUN", ""))  # of which 15 characters remain, for launch.alive()
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    numpy.random.seed()
    if asked["env"].get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(asked["env"]["OMP_NUM_THREADS"]))
    first, *arguments = asked["arguments"]
    sys.orig_argv = [sys.executable, *asked["arguments"]]
    if first == "-m":
        sys.argv, sys.path[0] = ["-m", *arguments[1:]], asked["cwd"]
        runpy._run_module_as_main(arguments[0])
    else:
        sys.argv, sys.path[0] = asked["arguments"], os.path.dirname(os.path.abspath(first))
        names = sys.modules["__main__"].__dict__
        names["__file__"] = first
        with open(first, "rb") as script:
            exec(compile(script.read(), first, "exec", dont_inherit=True), names)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        for package in PACKAGES:
            __import__(package)
        become(serve(sys.argv[2]))
    else:
        stand_in(sys.argv[1], sys.argv[2:])
