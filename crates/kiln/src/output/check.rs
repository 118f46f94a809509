//! The check that images must pass before they are written or shown.

use std::time::Duration;

use kiln_filters::ImageCheck;

use crate::args::CheckArgs;
use crate::error::CliError;

impl CheckArgs {
    /// Returns the check, if there is one.
    pub fn check(&self) -> Result<Option<ImageCheck>, CliError> {
        let timeout = Duration::from_secs(self.check_timeout.unwrap_or(30).into());
        let check = self.check_with.as_deref().map(|option| ImageCheck::new(option, timeout)).transpose();
        check.map_err(|invalid| CliError::usage(invalid.what).hint(invalid.hint))
    }
}
