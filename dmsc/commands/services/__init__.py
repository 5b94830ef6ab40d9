"""Commands about model services: deploying, changing and asking them."""
