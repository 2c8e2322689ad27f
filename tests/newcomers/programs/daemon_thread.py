import threading
import time


def watch():
    while True:
        time.sleep(0.1)


threading.Thread(target=watch, daemon=True).start()
print("done")
