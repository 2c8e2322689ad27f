from helpers.model import NAME

print("model", NAME)
