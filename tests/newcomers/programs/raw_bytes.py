import sys

sys.stdout.buffer.write(b"\x1b[2J\xff\xfe\x00 binary \x07\n")
