"""Provider `aws`: fleets of EC2 machines, spot and on-demand. boto3 is imported where a call is made, not before."""
