print("x" * 200000)
print("end")
