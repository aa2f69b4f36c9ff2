//! The relayers: [`wire`] knows their JSON (both dialects, pure), [`client`] talks to one of them, [`pool`] watches all of
//! them, [`routing`] decides which one takes the next transaction (pure).

pub mod client;
pub mod pool;
pub mod routing;
pub mod wire;
