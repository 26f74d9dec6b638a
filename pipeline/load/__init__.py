"""Load: closed-loop levels against a running server, one record per request, and every figure recomputed from them."""
