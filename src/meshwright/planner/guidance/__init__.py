"""Why a plan is the best one, what it costs, and what others would do."""
