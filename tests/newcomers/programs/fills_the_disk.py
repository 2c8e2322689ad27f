with open("/dev/full", "w") as file:
    file.write("weights" * 10000)
