# A logger, a monitor, a server for plots: started, and never ended.
import subprocess
import sys

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print("done")
