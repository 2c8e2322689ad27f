print("损失 0.5 · Verlust · потеря · 🔥")
