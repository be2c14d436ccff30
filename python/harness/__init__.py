"""What a developer runs: the numpy oracle, golden bundles and the matrix. The product never imports it."""
