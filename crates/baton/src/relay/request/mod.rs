//! What a client asks for, read from JSON with every problem found at once (pure).

pub mod call;
pub mod forward;
