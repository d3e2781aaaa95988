"""Local servers, the demo and its model, deployment. The product imports none of it, save the CLI's local commands."""
