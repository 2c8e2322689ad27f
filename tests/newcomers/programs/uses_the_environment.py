import os

print("mode", os.environ["MODE"], "shell", os.environ.get("HOME") is not None)
