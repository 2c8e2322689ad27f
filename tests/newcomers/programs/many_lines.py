for number in range(20000):
    print(f"line {number}: loss 0.{number:05d}")
