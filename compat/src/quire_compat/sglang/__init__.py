"""SGLang's dialect: flags, the endpoint /generate, and the engine in Python."""
