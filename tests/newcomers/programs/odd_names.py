from pathlib import Path

Path("out").mkdir()
Path("out/two words (1).txt").write_text("a")
Path("out/数据.txt").write_text("b")
