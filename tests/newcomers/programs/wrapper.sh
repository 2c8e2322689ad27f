#!/bin/bash
python hello.py
