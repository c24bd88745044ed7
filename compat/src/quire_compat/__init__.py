"""Console scripts, the check for real packages, and SGLang's dialect."""
