"""Stage 11, latent SDEs: hidden states that follow a learned SDE, observed through a decoder.

`_posterior` contains the encoder, the posterior marginals and the decoder, `_bound` the lower bound that
training maximises without simulation, and `_particles` the likelihood by particles that are guided by the
observations. `_latent_sde` is the model and `_fit_latent` fits it.
"""

from ._bound import Forecasting as Forecasting, SDEMatching as SDEMatching
from ._fit_latent import fit_latent as fit_latent
from ._latent_sde import (
    LatentPaths as LatentPaths,
    LatentSDE as LatentSDE,
    LikelihoodEstimate as LikelihoodEstimate,
)
from ._posterior import (
    DrivenSDE as DrivenSDE,
    Encoder as Encoder,
    IndependentNormal as IndependentNormal,
    NormalDecoder as NormalDecoder,
    Posterior as Posterior,
)
