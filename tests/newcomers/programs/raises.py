def train():
    raise ValueError("shapes (3, 4) and (5,) do not fit")


train()
