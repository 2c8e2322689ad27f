import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--name", default="x")
parser.add_argument("files", nargs="*")
print(vars(parser.parse_args()))
