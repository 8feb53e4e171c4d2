"""Studies: one file asks one question and answers it with a result, figures and a report."""
