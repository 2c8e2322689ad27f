# What stands in a folder of results after some weeks.
import os

os.makedirs("out/sub")
for name in ("out/model.pt", "out/sub/log", "out/empty", "out/two\nlines", b"out/caf\xe9.txt"):
    open(name, "w").write("x" if name != "out/empty" else "")
os.symlink("model.pt", "out/latest.pt")
os.symlink("/etc/hostname", "out/elsewhere")
os.symlink("nowhere", "out/dangling")
os.symlink("../out", "out/ring")
os.mkfifo("out/pipe")
print("done")
