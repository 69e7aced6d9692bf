// Where LibTorch's methods of tensors have other signatures: shards that were given other data are found at the next
// operator, and hooks on them are not called.
