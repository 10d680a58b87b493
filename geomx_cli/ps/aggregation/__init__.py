"""Server-side aggregation of contributions to a slice: summing, deciding, answering."""
