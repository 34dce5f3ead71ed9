"""How the embedded pairs are made: corpus, tokenizer, target, distilled draft, and what they measure."""
