# A script for a server of one's own, where the terminal goes away.
import os
import time

if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
time.sleep(600)
open("result.txt", "w").write("trained")
