"""HTTP services: connections, health, and expensive calls in processes of their own."""
