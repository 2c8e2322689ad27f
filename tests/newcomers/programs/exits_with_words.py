import sys

sys.exit("the configuration names no dataset")
