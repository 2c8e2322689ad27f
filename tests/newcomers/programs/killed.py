# As the kernel ends what takes too much memory.
import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
