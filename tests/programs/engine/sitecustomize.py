"""Python imports this before anything else where PYTHONPATH names this folder first, as fakes/pulumi_programs.py has it
for the engine: what that starts of ours is forked, and this process stands for it.
"""

import os
import sys

_FORKED = ("pulumi-resource-mgpu", "pulumi-language-python-exec")

_server = os.environ.pop("MGPU_TESTS_SERVER")
_here, _, os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)
_words = [word for word in sys.orig_argv if word.endswith(_FORKED)]
if _words:
    sys.path.insert(0, f"{_here}/../..")
    import stand_in

    stand_in.stand(_server, _words[0], sys.orig_argv[sys.orig_argv.index(_words[0]) + 1 :], os.environ)
