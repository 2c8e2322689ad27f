import threading


def work():
    raise ZeroDivisionError("in a thread")


thread = threading.Thread(target=work)
thread.start()
thread.join()
print("the program goes on")
