"""Processes that a script of the tests starts."""

import subprocess


def stop(process, seconds):
    """Asks a process to end, and kills it if it has not ended after so many seconds."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
