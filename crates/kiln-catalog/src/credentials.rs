//! Whom this machine trusts: the user's own credentials, and roots that are given.

use std::path::PathBuf;

use kiln_base::folders;
use kiln_credentials::{NewCredentials, Trust};

use crate::error::{Error, Result};

/// The root that `kiln credentials new` made, if it did: files signed below it are the user's own.
pub fn own_trust() -> Trust {
    let mut trust = Trust::default();
    let root = folders::credentials().map(|folder| NewCredentials::in_folder(&folder).root);
    if let Some(root) = root.filter(|root| root.is_file()) {
        // One that is damaged makes nobody trusted.
        let _ = trust.add_own(&root);
    }
    trust
}

/// One's own root, and those of PEM files.
pub fn trust_with(roots: &[PathBuf]) -> Result<Trust> {
    let mut trust = own_trust();
    for root in roots {
        trust.add(root).map_err(|error| Error::engine(kiln_engine::Error::Credentials(error)))?;
    }
    Ok(trust)
}
