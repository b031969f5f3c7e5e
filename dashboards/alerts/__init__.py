"""Recording rules and alerts as code; ``opsd alerts build`` writes them as Prometheus reads them."""
