# A script as it comes from a laptop: it saves beside itself.
for epoch in range(3):
    print(f"epoch {epoch}: loss {1 / (epoch + 1):.3f}")
with open("model.pt", "wb") as file:
    file.write(b"weights")
