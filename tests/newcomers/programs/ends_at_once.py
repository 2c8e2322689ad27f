# No line break, no clean-up: as C++ code ends, and some watchdogs.
import os
import sys

sys.stdout.write("loss is nan, giving up")
sys.stdout.flush()
os._exit(7)
