//! `kiln credentials`: makes and shows the key and certificates that images are signed with.

use kiln_catalog::properties::Properties;
use kiln_credentials::NewCredentials;

use crate::args::{CredentialsArgs, CredentialsCommand};
use crate::error::CliError;
use crate::output;
use crate::output::sign::folder;

pub fn run(args: &CredentialsArgs) -> Result<(), CliError> {
    let folder = match &args.folder {
        Some(folder) => folder.clone(),
        None => folder()?,
    };
    let files = NewCredentials::in_folder(&folder);
    if let CredentialsCommand::New { name, overwrite } = &args.command {
        if files.key.exists() && !overwrite {
            let message = format!("`{}` exists already", files.key.display());
            return Err(CliError::new(message).hint(
                "images that it signed stay valid; --overwrite replaces it, --folder chooses another folder",
            ));
        }
        let name = name.trim();
        if name.is_empty() || name.chars().count() > 64 || name.chars().any(char::is_control) {
            return Err(CliError::usage("--name takes 1 to 64 characters"));
        }
        output::create_folder(&folder)?;
        files.create(name)?;
    }
    let signer = files.open()?;
    let text = Properties::default()
        .with("name", signer.name())
        .with("key", format!("{} (private: keep it)", files.key.display()))
        .with("certificate", files.certificate.display().to_string())
        .with("root", format!("{} (for those who check your images)", files.root.display()))
        .with("valid until", signer.valid_until().date())
        .to_text();
    output::print(text.as_bytes())
}
