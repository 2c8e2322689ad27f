# Data loading in processes of its own.
import multiprocessing


def load(index):
    return index * index


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(sum(pool.map(load, range(10))))
