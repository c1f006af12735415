"""SIGTERM bounds a process's end, whatever its main thread does. Real processes, real signals."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from spes_p2p.peer.termination import SAME_SECONDS

PROGRAM = """
import ctypes, os, signal, sys, threading, time
from spes_p2p.cli import Terminated
from spes_p2p.peer.termination import Termination

def say(*words):
    "Write a line at once: a handler or a thread that prints beside the main thread's print fails."
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def hang(*words):
    "Wait in C code that no signal interrupts, as in a collective; say the words once no handler can run any more."
    libc, mutex, waits = ctypes.CDLL(None), ctypes.create_string_buffer(64), threading.Lock()

    def tell():
        with waits:
            sys.setswitchinterval(0.005)
        say(*words)

    waits.acquire()
    if words:
        threading.Thread(target=tell).start()
    libc.pthread_mutex_lock(mutex)
    sys.setswitchinterval(1000.0)  # the other thread gets its turn in the call that never returns, and not before
    waits.release()
    libc.pthread_mutex_lock(mutex)

def hand_over(seconds):
    say("handed over", round(seconds, 1))

"""
SLACK = 15.0
"""Seconds more than promised that a loaded machine may need; far less than a hang."""


class Process:
    """A running program that has printed `ready`."""

    def __init__(self, program: str) -> None:
        words = [sys.executable, "-c", PROGRAM + textwrap.dedent(program)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def terminate(self, times: int = 1, pause: float = SAME_SECONDS + 3.0) -> None:
        self.process.send_signal(signal.SIGTERM)
        for _ in range(times - 1):
            time.sleep(pause)
            self.process.send_signal(signal.SIGTERM)

    def end(self, seconds: float) -> str:
        """Return what it has printed, once it has ended as SIGTERM ends it."""
        try:
            output, errors = self.process.communicate(timeout=seconds + SLACK)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert self.process.returncode in (130, -signal.SIGALRM), errors
        return output


def test_a_hung_main_thread_does_not_keep_the_slots():
    process = Process("""
        with Termination(8.0) as end:
            end.prepare(hand_over)
            hang("ready")
    """)
    process.terminate()
    [line] = process.end(8).splitlines()
    assert line.startswith("handed over") and float(line.split()[-1]) <= 4.0, "from what the grace has left"


def test_a_process_that_hangs_before_it_has_slots_ends_within_its_grace():
    process = Process("""
        with Termination(4.0):
            hang("ready")
    """)
    process.terminate()
    assert process.end(4) == ""


@pytest.mark.parametrize("after", ["pass", "hang()"])
def test_a_running_main_thread_hands_over_itself_and_once(after):
    process = Process(f"""
        with Termination(6.0) as end:
            end.prepare(lambda seconds: hand_over(min(seconds, 1.0)))  # far less than the grace has left
            try:
                say("ready")
                time.sleep(1000)
            except Terminated:
                assert threading.current_thread() is threading.main_thread()
                end.hand_over()
                end.hand_over()
                {after}
        sys.exit(130)
    """)
    process.terminate()
    assert process.end(6) == "handed over 1.0\n"


@pytest.mark.full
@pytest.mark.parametrize("main", ["hang()", "end.hand_over()"])
def test_a_hand_over_that_hangs_ends_with_the_grace_and_at_once_with_a_second_sigterm(main):
    for grace, times in ((4.0, 1), (1000.0, 2)):
        process = Process(f"""
            with Termination({grace}) as end:
                end.prepare(lambda seconds: hang())
                try:
                    say("ready")
                    time.sleep(1000)
                except Terminated:
                    {main}
        """)
        process.terminate(times)
        process.end(5)


def test_sigterms_of_a_scheduler_and_of_its_batch_script_are_one():
    process = Process("""
        with Termination(1000.0) as end:
            end.prepare(lambda seconds: time.sleep(5.0) or hand_over(seconds))
            try:
                say("ready")
                time.sleep(1000)
            except Terminated:
                end.hand_over()
                os._exit(130)
    """)
    process.terminate(3, pause=0.2)
    assert process.end(5).startswith("handed over")


def test_a_sigterm_that_follows_before_the_watch_has_had_its_turn_is_the_same():
    process = Process("""
        with Termination(60.0) as end:
            sys.setswitchinterval(1000.0)  # as on a machine that is busy with other programs
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except Terminated:
                os.kill(os.getpid(), signal.SIGTERM)
                say("ready")
                os._exit(130)
    """)
    assert process.end(5) == ""


def test_another_rank_goes_on_until_its_leader_has_left_and_not_beyond_its_grace():
    process = Process("""
        with Termination(6.0, is_leader=False) as end:
            say("ready")
            while not end.is_asked:
                time.sleep(0.01)
            say("goes on")
            time.sleep(1000)
    """)
    process.terminate()
    assert process.end(6) == "goes on\n"


def test_ranks_are_told_and_a_forks_own_signals_do_not_reach_the_parent():
    process = Process("""
        rank = os.fork()
        if rank == 0:
            signal.pause()
        with Termination(1000.0, ranks=[rank]) as end:
            listens, tell = os.pipe()
            fork = os.fork()
            if fork == 0:
                signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
                os.write(tell, b"x")
                while True:
                    time.sleep(0.01)
            os.read(listens, 1)
            os.kill(fork, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
            time.sleep(0.5)
            assert not end.is_asked
            try:
                say("ready")
                time.sleep(1000)
            except Terminated:
                assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == -signal.SIGTERM
                say("told")
                os._exit(130)
    """)
    process.terminate()
    assert process.end(5) == "told\n"


def test_without_a_signal_everything_is_as_it_was():
    process = Process("""
        signal.signal(signal.SIGTERM, lambda *_: (say("own"), os._exit(130)))
        with Termination(1.0):
            pass
        assert signal.set_wakeup_fd(-1) == -1
        say("ready")
        time.sleep(1000)
    """)
    process.terminate()
    assert process.end(5) == "own\n"
