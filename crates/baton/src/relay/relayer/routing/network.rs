//! Whether a relayer is on the network that Baton pays on (pure). One that is not gets no work: a wrong URL must not pay on
//! another chain.
//!
//! Chain ids decide where they are known. Otherwise the names that relayers list are compared with the first relayer's.

/// What is known of one relayer's network.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Network {
    /// As the relayer lists it.
    pub(super) name: Option<String>,
    pub(super) chain_id: ChainId,
}

/// The answer to a question for the chain's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ChainId {
    /// Not asked yet.
    #[default]
    Unasked,
    /// The relayer does not tell.
    NotTold,
    /// The id.
    Known(u64),
}

impl ChainId {
    fn known(self) -> Option<u64> {
        match self {
            Self::Known(id) => Some(id),
            Self::Unasked | Self::NotTold => None,
        }
    }
}

/// Whether a relayer's network is the right one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Fit {
    /// It is, or nothing speaks against it.
    #[default]
    Fits,
    /// A chain id is expected and the relayer has not been asked for its own.
    Unchecked,
    /// The relayer is on another network.
    Wrong(WrongNetwork),
}

impl Fit {
    pub(super) fn wrong(&self) -> Option<&WrongNetwork> {
        match self {
            Self::Wrong(wrong) => Some(wrong),
            Self::Fits | Self::Unchecked => None,
        }
    }
}

/// Found and expected network of a relayer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongNetwork {
    /// The name that the relayer lists.
    pub network: Option<String>,
    /// Its chain id.
    pub chain_id: Option<u64>,
    /// The name that the first relayer lists, if names decide.
    pub expected_network: Option<String>,
    /// The expected chain id, if ids decide.
    pub expected_chain_id: Option<u64>,
}

impl std::fmt::Display for WrongNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "unnamed".to_owned());
        match (self.chain_id, self.expected_chain_id) {
            (Some(found), Some(expected)) => {
                write!(f, "it is on the network {} with chain id {found}; expected is {expected}", name(&self.network))
            }
            _ => write!(
                f,
                "it is on the network {}, and the first relayer on {}",
                name(&self.network),
                name(&self.expected_network)
            ),
        }
    }
}

/// Each relayer's fit. `expected` is the chain id of the configuration or of the chain.
pub(super) fn fits(networks: &[Network], expected: Option<u64>) -> Vec<Fit> {
    let wrong_by_id = |network: &Network| expected.zip(network.chain_id.known()).is_some_and(|(a, b)| a != b);
    // The relayer that the others are compared with: one whose id was confirmed, or else the first.
    let confirmed = networks.iter().find(|network| expected.is_some() && network.chain_id.known() == expected);
    let reference = confirmed.or_else(|| {
        networks
            .iter()
            .find(|network| !wrong_by_id(network) && (network.name.is_some() || network.chain_id.known().is_some()))
    });
    let fit = |network: &Network| {
        let wrong = |expected_network: Option<String>, expected_chain_id: Option<u64>| {
            Fit::Wrong(WrongNetwork {
                network: network.name.clone(),
                chain_id: network.chain_id.known(),
                expected_network,
                expected_chain_id,
            })
        };
        let expected_id = expected.or_else(|| reference?.chain_id.known());
        match (expected_id, network.chain_id) {
            (Some(expected), ChainId::Known(found)) if found == expected => return Fit::Fits,
            (Some(expected), ChainId::Known(_)) => return wrong(None, Some(expected)),
            (Some(_), ChainId::Unasked) if expected.is_some() => return Fit::Unchecked,
            _ => {}
        }
        let reference = reference.and_then(|reference| reference.name.as_ref());
        match (&network.name, reference) {
            (Some(found), Some(expected)) if found != expected => wrong(Some(expected.clone()), None),
            _ => Fit::Fits,
        }
    };
    networks.iter().map(fit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(name: &str, chain_id: ChainId) -> Network {
        Network { name: (!name.is_empty()).then(|| name.to_owned()), chain_id }
    }

    fn judged(expected: Option<u64>, networks: &[(&str, ChainId)]) -> String {
        let networks: Vec<_> = networks.iter().map(|(name, id)| network(name, *id)).collect();
        let letter = |fit: &Fit| match fit {
            Fit::Fits => 'f',
            Fit::Unchecked => 'u',
            Fit::Wrong(_) => 'w',
        };
        fits(&networks, expected).iter().map(letter).collect()
    }

    #[test]
    fn an_expected_chain_id_decides_and_is_waited_for() {
        use ChainId::{Known, NotTold, Unasked};
        assert_eq!(judged(Some(1), &[("a", Known(5)), ("b", Known(1)), ("c", Unasked)]), "wfu");
        assert_eq!(judged(Some(1), &[("b", Known(1)), ("b", NotTold), ("c", NotTold)]), "ffw", "names help out");
        assert_eq!(judged(Some(1), &[("a", Known(5)), ("b", NotTold)]), "wf", "a wrong relayer is no reference");
        assert_eq!(judged(Some(1), &[("", NotTold)]), "f");
    }

    #[test]
    fn without_an_expectation_relayers_must_agree_with_the_first() {
        use ChainId::{Known, NotTold, Unasked};
        assert_eq!(judged(None, &[("a", Unasked), ("a", Unasked), ("b", Unasked)]), "ffw");
        assert_eq!(judged(None, &[("", Unasked), ("a", Unasked), ("b", Unasked)]), "ffw", "the first with a name");
        assert_eq!(judged(None, &[("a", Known(1)), ("b", Known(1)), ("a", Known(2))]), "ffw", "ids before names");
        assert_eq!(judged(None, &[("a", Known(1)), ("b", NotTold), ("", NotTold)]), "fwf");
    }

    #[test]
    fn the_text_names_found_and_expected() {
        let networks = [network("mainnet", ChainId::Known(1)), network("sepolia", ChainId::Known(11_155_111))];
        let Fit::Wrong(wrong) = fits(&networks, Some(1)).remove(1) else { panic!() };
        assert_eq!(wrong.to_string(), "it is on the network sepolia with chain id 11155111; expected is 1");
        let names = [network("mainnet", ChainId::NotTold), network("sepolia", ChainId::NotTold)];
        let Fit::Wrong(wrong) = fits(&names, None).remove(1) else { panic!() };
        assert_eq!(wrong.to_string(), "it is on the network sepolia, and the first relayer on mainnet");
    }
}
