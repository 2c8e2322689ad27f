# Paths are relative to the script's folder, as on a laptop.
from pathlib import Path

print("config:", Path("config.yaml").read_text().strip())
print("beside:", Path(__file__).with_name("config.yaml").exists())
