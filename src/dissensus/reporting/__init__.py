"""From evaluations to numbers with intervals, sentences, figures and pages; knows nothing of bench."""
