//! Our neighbours, the relayers: [`wire`] knows their JSON (both dialects, pure), [`client`] talks HTTP to one of
//! them, [`pool`] keeps watch over all of them and says which one takes the next transaction.

pub mod client;
pub mod pool;
pub mod routing;
pub mod wire;
