//! The user's own credentials, and whom they make this machine trust.

use std::path::{Path, PathBuf};

use kiln_credentials::{NewCredentials, Trust};

use crate::ModelFolders;

/// The folder of the user's own key and certificates, in the data folder; `None` if there is no data folder.
pub fn credentials_folder() -> Option<PathBuf> {
    Some(ModelFolders::own()?.parent().map(Path::to_path_buf)?.join("credentials"))
}

/// The root that `kiln credentials new` made, if it did: files signed below it are the user's own.
pub fn own_trust() -> Trust {
    let mut trust = Trust::default();
    let root = credentials_folder().map(|folder| NewCredentials::in_folder(&folder).root);
    if let Some(root) = root.filter(|root| root.is_file()) {
        // One that is damaged makes nobody trusted.
        let _ = trust.add(&root);
    }
    trust
}
